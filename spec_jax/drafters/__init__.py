"""Ways of drafting: `base.py` has the drafter's interface, each other file one drafter, `build.py` their names."""
