"""Every setting: sections, defaults, and mistakes in them."""
