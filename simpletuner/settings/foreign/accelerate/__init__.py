"""accelerate's config file and the arguments of accelerate launch."""
