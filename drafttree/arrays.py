"""Types of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

FloatArray = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int32]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
LongArray = np.ndarray[Any, np.dtype[np.int64]]
