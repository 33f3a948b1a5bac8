"""The one way in which the program opens files that others made; every package that reads files imports it.

`roles` lists the kinds of files and how large each may be, `opener` opens and reads them. Nothing else in the program
opens a file for reading (a test checks), so that these guarantees hold for every file: it is a regular file, inside of
the model (or named by a person), and no more of it is read than its role allows.

In this folder:

    opener       Open files that others made, and check that they are regular, inside the model
    roles        Kinds of files, and how many bytes each may have
    strict_json  Parse untrusted JSON in bounded time and memory
    system       System calls that Linux and macOS offer differently
"""
