"""launch: starts, watches and finds a real Triton on this machine."""
