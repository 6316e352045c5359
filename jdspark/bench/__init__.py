"""`python -m jdspark bench`: how fast the decode step and its parts are on this machine, with torch beside it."""
