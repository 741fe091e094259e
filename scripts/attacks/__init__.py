"""The attacks of scripts/hostile.py: each module adds some to `trial.ATTACKS`."""
