"""The attacks of scripts/hardening/hostile.py, which are listed in `table`."""
