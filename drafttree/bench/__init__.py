"""Measurement of a draft method against plain decoding, both in the real engine."""
