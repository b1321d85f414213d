"""Where maths runs: one file a compute backend, all behind the protocol of `backend.py` (METHODS 1.3)."""
