"""Draft trees of requests with structured output in vLLM.

vLLM's scheduler holds the requests' grammars, and masks the logits along chains of draft tokens. A
subclass of it walks the trees instead.
"""
