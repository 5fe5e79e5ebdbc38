"""Options as data: names, ranges, defaults and aliases. This package does not import torch."""
