// @ts-check
// Types of the charts' data, as board.py writes them. The browser never loads this file.

/** @typedef {[number, number]} Ends */
/** @typedef {[number, number, number]} AxisEnds  low, high, and scale: 0 linear, 1 logarithmic, 2 logarithmic both ways */

/**
 * @typedef {object} Line
 * @property {string} name
 * @property {number[]} x
 * @property {(number | null)[]} y
 * @property {number[]} [dx]  distances of the steps, from which x is made
 * @property {string} colour
 * @property {number} [width]
 * @property {number} [alpha]
 * @property {number[]} [dash]
 * @property {string} [fill]
 * @property {number} [dots]
 * @property {boolean} [mute]  not in the tooltip
 * @property {(number | null)[]} [told]  values for the tooltip
 * @property {(number | null)[]} [low]
 * @property {(number | null)[]} [high]
 * @property {number} [place]  its place in the legend, where several runs are drawn
 * @property {boolean} [smooth]  smoothed by the server
 */

/**
 * @typedef {object} Panel
 * @property {string} name
 * @property {string} title
 * @property {string} [sub]
 * @property {string} [about]
 * @property {string} [unit]
 * @property {Line[]} lines
 * @property {Ends} range
 * @property {number} log
 * @property {AxisEnds[]} [ends]
 * @property {[number, string, string?][]} rules
 * @property {[number, string, string][]} bad
 * @property {[number, number, string, string][]} beyond
 */

/**
 * @typedef {object} LegendEntry
 * @property {string} name
 * @property {string} colour
 * @property {string} style  solid, dashed or dotted
 * @property {boolean} hollow
 * @property {string} note
 */

export {};
