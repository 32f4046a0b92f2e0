"""What programs run on: an engine in this process, a server of ours, and services of others."""
