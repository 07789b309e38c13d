"""Pictures of answers: one drawing for notebooks, pages and files, with the table behind it.

A picture is drawn once, as shapes on a canvas whose colours are names of ``memplan.report.pages.palette``; the
SVG and matplotlib's figure are two ways to write it down.
"""
