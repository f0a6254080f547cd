import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HexFormat;
import java.util.TreeMap;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.requests.AbstractResponse;
import org.apache.kafka.common.requests.RequestHeader;

/** Reads responses as a client does. args: a file with lines "key version hex", the frame without its size.
 *  For each line: "skipped", "failed WHY", or the error counts of the response, like "{29=2, 6=1}". */
public final class Responses {
    public static void main(String[] arguments) throws Exception {
        StringBuilder out = new StringBuilder();
        for (String line : Files.readAllLines(Path.of(arguments[0]))) {
            String[] parts = line.split(" ");
            short key = Short.parseShort(parts[0]), version = Short.parseShort(parts[1]);
            if (!ApiKeys.hasId(key) || !ApiKeys.forId(key).isVersionSupported(version)) {
                out.append("skipped\n");
                continue;
            }
            ByteBuffer frame = ByteBuffer.wrap(HexFormat.of().parseHex(parts[2]));
            try {
                RequestHeader header = new RequestHeader(ApiKeys.forId(key), version, "client", 7);
                AbstractResponse response = AbstractResponse.parseResponse(frame, header);
                TreeMap<Short, Integer> counts = new TreeMap<>();
                response.errorCounts().forEach((error, count) -> counts.merge(error.code(), count, Integer::sum));
                out.append(frame.hasRemaining() ? "failed bytes left" : counts).append('\n');
            } catch (Exception fault) {
                out.append("failed ").append(fault.toString().replace('\n', ' ')).append('\n');
            }
        }
        System.out.print(out);
    }
}
