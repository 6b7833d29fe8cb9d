"""What the engine process runs: the core loop, the adapters, and the libraries behind them."""
