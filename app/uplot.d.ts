// endpoint.py wraps the drawing library as this module.
import uPlot = require("./vendor/uPlot");
export default uPlot;
