"""Model families, one file each: a subclass of ModelFamily that states what differs from the others."""
