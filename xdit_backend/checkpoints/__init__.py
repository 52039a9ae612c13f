"""Files of weights: headers, configs from shapes, conversion to diffusers' names, lazy loading. Nothing is fetched."""
