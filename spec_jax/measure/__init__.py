"""What a pair gains: decoding lines, timing them, and the figures and reports of it."""
