"""What the files of a dataset say of themselves: names, headers, captions, and the kept scan."""
