"""Does a live engine keep what its adapter declares? Small real requests, sent through the adapter itself.

    report = await probe(adapter)             # adapters/probing/probe.py
    [each for each in report.results if each.verdict is Verdict.CONTRADICTED]

`verdicts` decides, `answers` asks, `proofs` knows what shows that a capability is honoured and not merely accepted,
`recognise` tells which engine stands behind a url, and `faces` shows the report.
"""
