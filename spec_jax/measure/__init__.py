"""Measures the gain of a pair: decoding lines, timing, figures and reports."""
