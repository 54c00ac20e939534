"""Studies: speculative decoding measured against plain decoding in the same run, and what is written about it."""
