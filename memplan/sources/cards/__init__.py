"""Cards, and what a site says of its own: the catalog, prices, pools."""
