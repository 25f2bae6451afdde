"""Runs compared: a table for the terminal, and a page for the browser.

    read.py      run directories, as far as they can be read
    layers.py    what they say of layers, cut down while it is read
    summary.py   a run's numbers; runs side by side
    costs.py     what balancing costs of a step
    verdict.py   the same in sentences
    run_page.py  the page of runs; `run_page.js` draws it
    page.py      any page: one file without network; `page.css`, `page.js`
    live.py      serves the page of runs that go on

Python counts and says, JavaScript draws.
"""
