import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.TextNode;
import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.EOFException;
import java.io.OutputStream;
import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import org.apache.kafka.common.message.ApiMessageType;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.requests.RequestHeader;

/** Reads requests as a broker does: the header, then the generated class of the API.
 *  Standard input: frames, each behind its size. Standard output: a line for each, [client id, body] as JSON, or "!" and
 *  why not. */
public final class Decoder {
    private static final Map<Short, MethodHandle> CONVERTERS = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        DataInputStream in = new DataInputStream(new BufferedInputStream(System.in, 1 << 20));
        OutputStream out = new BufferedOutputStream(System.out, 1 << 20);
        while (true) {
            int size;
            try {
                size = in.readInt();
            } catch (EOFException end) {
                break;
            }
            byte[] frame = new byte[size];
            in.readFully(frame);
            String line;
            try {
                line = read(ByteBuffer.wrap(frame));
            } catch (Throwable fault) {
                line = "!" + fault.toString().replace('\n', ' ');
            }
            out.write(line.getBytes(StandardCharsets.UTF_8));
            out.write('\n');
            if (in.available() == 0) out.flush();
        }
        out.flush();
    }

    private static String read(ByteBuffer buffer) throws Throwable {
        RequestHeader header = RequestHeader.parse(buffer);
        short key = header.apiKey().id, version = header.apiVersion();
        ApiMessageType type = ApiMessageType.fromApiKey(key);
        if (version < type.lowestSupportedVersion() || version > type.highestSupportedVersion(true)) {
            return "!unsupported";
        }
        ApiMessage message = type.newRequest();
        message.read(new ByteBufferAccessor(buffer), version);
        MethodHandle converter = CONVERTERS.get(key);
        if (converter == null) {
            Class<?> of = Class.forName(message.getClass().getName() + "JsonConverter");
            Method method = of.getMethod("write", message.getClass(), short.class, boolean.class);
            converter = MethodHandles.lookup().unreflect(method);
            CONVERTERS.put(key, converter);
        }
        String clientId = header.clientId() == null ? "" : header.clientId();
        return "[" + new TextNode(clientId) + "," + (JsonNode) converter.invoke(message, version, false) + "]";
    }
}
