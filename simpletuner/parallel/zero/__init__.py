"""DeepSpeed's ZeRO 1 to 3 as one more engine. Only `building` and `fragments` know DeepSpeed's insides."""
