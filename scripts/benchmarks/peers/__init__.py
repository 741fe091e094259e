"""The contenders of bench_peers.py, bench_linalg.py and bench_hosts.py: jobs that multiply on request, and results."""
