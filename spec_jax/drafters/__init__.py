"""Ways of drafting: `base.py` says what the loop asks of a draft; each other file is one, `build.py` names them."""
