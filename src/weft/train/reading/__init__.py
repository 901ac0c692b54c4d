"""Data as people have it, files of many formats, to numbers of tokens and to images. In: paths. Out: records, token files, images."""
