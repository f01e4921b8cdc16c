"""`config`: show, check, start and export settings; take over files of the original and of other trainers."""
