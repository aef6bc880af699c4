"""Measurements, experiments and set-up; none of it is part of the wheel."""
