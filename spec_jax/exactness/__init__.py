"""Tests whether speculative decoding of a pair is exact, and to what deviation: run by scripts/verify.py.

    rule.closed_form  the accept/resample rule, integrated over its random numbers; no model
    greedy.greedy     ids against the plain decoder's, one prompt at a time and in an uneven batch
    sampled.sampled   texts against plain ones and the target's own probabilities; the draft's tokens against the
                      q it reports; rows against their neighbours; counts against a trace of the loop

Each returns rows of a table, `checks.Check`, with the deviation that each would have detected.
"""
