"""The attacks of scripts/hardening/hostile.py: each module adds some to `trial.ATTACKS`."""
