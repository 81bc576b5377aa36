"""Every door of `penstock.boundary`, and what uses one, against thousands of broken inputs. See README.md."""
