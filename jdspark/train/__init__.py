"""Training the shipped pair: a byte-level target on source files, then its drafter on the target's hidden states.

`python -m jdspark.train OUT` runs both. Needs optax (`pip install -e '.[train]'`).
"""
