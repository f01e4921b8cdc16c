"""Model families behind one Protocol: a family is one file and one registry row."""
