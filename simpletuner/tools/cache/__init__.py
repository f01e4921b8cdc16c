"""List and clear what simpletuner keeps in cache folders."""
