"""`simpletuner lora`: adapters are merged into a model, extracted from one, cut to a rank, averaged."""
