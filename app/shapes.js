// @ts-check
// Types of the charts' data, as board.py writes them. The browser never loads this file.

/** @typedef {[number, number]} Ends */
/** @typedef {[number, number, number]} AxisEnds  low, high, and scale: 0 linear, 1 logarithmic, 2 logarithmic both ways */
/** @typedef {number | string} Step  as text where a browser would round it */

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
 * @property {(number | null)[]} [shown]  values for the tooltip
 * @property {(number | null)[]} [low]
 * @property {(number | null)[]} [high]
 * @property {number} [place]  its place in the legend, where several runs are drawn
 * @property {boolean} [smooth]  smoothed by the server
 * @property {boolean} [right]  on the second axis
 */

/**
 * @typedef {object} Cells  a heat map, row by row
 * @property {string[]} names
 * @property {number[]} starts
 * @property {(number | null)[]} values
 * @property {(number | null)[]} usual
 * @property {number[]} bad
 */

/**
 * @typedef {object} Shades  a density map, column by column
 * @property {number[]} starts
 * @property {number[]} cells  hundredths of the root of the share of ``most``
 * @property {number} most
 * @property {number[]} ends
 * @property {[number, string][]} ticks
 */

/**
 * @typedef {object} Panel
 * @property {string} name
 * @property {string} title
 * @property {string} [sub]
 * @property {string} [about]
 * @property {string} [family]
 * @property {string} [unit]
 * @property {Line[]} lines
 * @property {Ends} range
 * @property {number} log
 * @property {string} [scale]
 * @property {AxisEnds[]} [ends]
 * @property {Ends} [usual]
 * @property {Ends | null} [band]
 * @property {[number, string, string?][]} rules
 * @property {[number, string, string][]} bad
 * @property {[number, number, string, string][]} beyond
 * @property {number} height
 * @property {string | null} [last]
 * @property {boolean} [lastBad]
 * @property {boolean} [pinned]
 * @property {string} [pin]
 * @property {number} [columns]
 * @property {Panel[]} [pair]
 * @property {boolean} [made]
 * @property {Cells} [cells]
 * @property {Shades} [shades]
 * @property {{range: Ends, log: number, colour: string}} [right]  the second axis
 */

/**
 * @typedef {object} LegendEntry
 * @property {string} name
 * @property {string} colour
 * @property {string} style  solid, dashed or dotted
 * @property {boolean} hollow
 * @property {string} note
 */

/** @typedef {{to: string, step: Step, label: string}} Link */

/**
 * @typedef {object} Mark
 * @property {number} x
 * @property {Step} step
 * @property {string} shape
 * @property {string} colour
 * @property {string} text
 * @property {string} more
 * @property {boolean} dashed  the onset of an alarm
 * @property {number | null} until  for an onset: where the alarm was resolved, null if it still fires
 * @property {string[]} families
 * @property {number} rank
 * @property {[string, string][]} lines
 * @property {Link | null} go
 */

/** @typedef {{line: string, quiet: string, grid: string, band: string, text: string, bad: string}} Ink */

/**
 * @typedef {object} Section
 * @property {string} key
 * @property {string} title
 * @property {string} note
 * @property {number} more
 * @property {boolean} open
 * @property {number} span
 * @property {Panel[]} panels
 */

/**
 * @typedef {object} Looks  what the server drew, and where the run's rows are
 * @property {string} smooth
 * @property {boolean} clip
 * @property {string[]} smooths
 * @property {string} [run]
 * @property {string} [axis]
 * @property {boolean} [live]
 * @property {number} [attempt]
 * @property {string} [after]
 * @property {string} [api]
 * @property {boolean} [whole]  the lines hold every row in the range
 */

/**
 * @typedef {object} BoardData
 * @property {string} key
 * @property {string} axis
 * @property {string} origin
 * @property {Ends} window
 * @property {Ends} whole
 * @property {Ends | null} asked
 * @property {number | null} at
 * @property {Ink} ink
 * @property {string[] | null} pins
 * @property {Looks} [looks]
 * @property {LegendEntry[]} [legend]
 * @property {import("./study.js").Study} [study]
 * @property {Mark[]} marks
 * @property {Panel[]} [strip]
 * @property {Section[]} [sections]
 * @property {import("./look.js").Look} [look]
 */

/** @typedef {{steps: Step[], times?: (number | null)[], width?: Step, through?: Step}} Rows  the last two with means: steps of a range, and the last step */

/**
 * @typedef {object} SeriesReply
 * @property {number} attempt
 * @property {boolean} live
 * @property {Step | null} last_step
 * @property {Step} next
 * @property {Rows[]} rows
 * @property {Record<string, {recorded: string, rows: number, values: (number | string | null)[], counts?: number[]}>} series  NaN and infinities by name
 * @property {boolean} [all]
 */

/**
 * @typedef {object} Component  of Streamlit
 * @property {boolean} [first]  of the page's first picture (first.js)
 * @property {HTMLElement | ShadowRoot} parentElement
 * @property {BoardData} data
 * @property {(name: string, value: unknown) => void} setTriggerValue
 */

/**
 * @typedef {object} Value  of a tooltip
 * @property {string} name
 * @property {number} x
 * @property {string} colour
 * @property {number | null} [value]
 * @property {string} [word]
 * @property {string} [note]
 * @property {boolean} [plain]
 */

export {};
