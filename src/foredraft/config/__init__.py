"""Options as data: names, ranges, defaults and aliases. The package `foredraft.config` does not import torch."""
