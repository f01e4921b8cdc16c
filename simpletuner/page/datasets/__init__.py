"""The datasets of a configuration as pictures: what `dataset check` finds in a separate process, and their captions.

routes.py          the page, checks and pictures; what needs Arrow or Pillow is imported by the first request
caption_routes.py  show, save and undo one caption
view.py            what a request names, and what the page shows of it
checks.py          start a check, follow it, and where its results are kept
images.py          choose, sort and page the images of a kept result
files.py           the only way from the name of an image in a request to its file
thumbnails.py      small pictures
captions.py        read, save and undo captions
journal.py         what was edited, so that nothing is lost
"""
