"""Mistakes on the torch side that a bitwise comparison of whole steps must notice; each takes pytest's monkeypatch."""

import dataclasses

from torch_bridge import eager, triton_kernels, whole_step


def swapped_operands(monkeypatch):
    swiglu = triton_kernels.swiglu
    monkeypatch.setattr(triton_kernels, "swiglu", lambda gate, up: swiglu(up, gate))


def stale_page_table(monkeypatch):
    """The pages of the first step for ever."""
    decode_step, first = whole_step.twin.decode_step, {}

    def stale(params, state, inputs, options):
        table = first.setdefault(inputs.encoded_offsets.shape, inputs.encoded_offsets.clone())
        return decode_step(params, state, dataclasses.replace(inputs, encoded_offsets=table), options)

    monkeypatch.setattr(whole_step.twin, "decode_step", stale)


def skipped_store(monkeypatch):
    monkeypatch.setattr(eager, "store_gen_context", lambda pool, *args, **static: pool)
    monkeypatch.setattr(triton_kernels, "store_prepared", lambda pool, *args, **static: pool)


def one_bit(monkeypatch):
    """The lowest bit of one number of one layer's attention."""
    attention = triton_kernels.block_attention

    def changed(*args, layer, **static):
        attended = attention(*args, layer=layer, **static)
        if layer == 1:
            kind = whole_step.torch.int16 if attended.element_size() == 2 else whole_step.torch.int32
            attended.view(kind)[0, 0, 0, 0] ^= 1
        return attended

    monkeypatch.setattr(triton_kernels, "block_attention", changed)


MISTAKES = {
    "swapped_operands": (swapped_operands, "block_hidden"),
    "stale_page_table": (stale_page_table, "state: pool"),
    "skipped_store": (skipped_store, "state: pool"),
    "one_bit": (one_bit, "block_hidden"),
}
"""With an array that must then differ."""
