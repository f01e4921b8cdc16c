"""The dataset file: keys, types of datasets, and rules between them."""
