"""Commands that look after machines and caches; training never imports them."""
