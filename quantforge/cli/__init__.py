"""The command line: options in, one call of a verb, a document or a table out.

In this folder:

    app        ``quantforge``: the verbs and the error boundary
    console    The only place that prints: stdout carries data, stderr everything else
    diff       ``quantforge diff``: how two models differ
    doctor     ``quantforge doctor``: whether this machine can do the work, by doing a little of it
    evaluate   ``quantforge eval``: one table for a reference and its descendants, whatever their format
    export     ``quantforge export``: move a model into a format without quantizing it again
    formats    ``quantforge formats``: what can be read and written, and what an export from each to each keeps
    inspect    ``quantforge inspect``: what is in a model, from headers alone
    options    Options that several verbs share, each with its one name, help and range
    plan       ``quantforge plan``: what would happen, from headers alone
    quantize   ``quantforge quantize``: run a recipe on a model
    recipes    ``quantforge recipes``: list the built-in recipes, or print one
    reproduce  ``quantforge reproduce``: make a result again from its manifest, and compare every file
    request    From options to a request: choices of a recipe, the policy on events, and numbers that are typed as texts
    run_log    Progress of a run: shown to people and, where a file is named, written for programs
    verify     ``quantforge verify``: look at a finished artifact, ours or anyone's
"""
