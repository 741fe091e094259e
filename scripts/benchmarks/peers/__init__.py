"""What bench_peers.py, bench_linalg.py and bench_hosts.py compare: jobs that work when told to, and their results."""
