"""What bench_peers.py compares: jobs that multiply when told to, and the libraries that they multiply with."""
