"""The one way in which this program opens files that others made: a leaf, imported by every package that reads any.

`roles` says which files there are and how large each may be, `opener` opens and reads them.
Nothing else in the program opens a file for reading (a test looks), so that what is promised here holds for every file:
it is a regular file, inside of the model (or named by a person), and no more of it is read than its role allows.

In this folder:

    opener       Opening files that somebody else made: regular, inside the model, no larger than their role allows
    roles        Roles of files, and how many bytes a file of each may have: the one table of limits
    strict_json  JSON of others, read in bounded time and memory
    system       Calls of the operating system that Linux and macOS offer differently: they are all here
"""
