"""One file per adapter; engine/registry.py is the only one that names them."""
