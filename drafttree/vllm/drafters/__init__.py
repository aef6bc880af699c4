"""vLLM model runners, one for each kind of drafter."""
