"""Measuring a draft method against plain decoding, both through the real engine."""
