"""Pure data every layer may use: no torch, no sockets, no environment."""
