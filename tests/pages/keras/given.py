"""Digits, as the page takes them for given."""

import os
import warnings

from sklearn.datasets import load_digits

os.environ.setdefault("KERAS_BACKEND", "torch")
warnings.simplefilter("ignore")  # those of the framework
digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target
x_test, y_test = x[1440:], y[1440:]
batches = [(x[at : at + 32], y[at : at + 32]) for at in range(0, 128, 32)]
